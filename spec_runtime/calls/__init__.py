"""What a caller asks of an engine, gets back piece by piece, and may end early."""
