"""Decodes several conversations together: a lane for each, and passes that all share."""
