"""Records what every step of one generation did, and draws it as one page."""
