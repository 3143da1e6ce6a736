"""What results are compared with, and how: the oracle, running extensions, checks of errors."""
