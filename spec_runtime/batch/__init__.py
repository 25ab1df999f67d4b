"""Answers several calls at a time: each on a lane, with passes that all share."""
