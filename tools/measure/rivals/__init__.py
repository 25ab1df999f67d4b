"""The engines that `compare_rivals.py` measures beside ours, each in an environment of its own."""
