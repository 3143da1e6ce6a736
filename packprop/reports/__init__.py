"""What people look at: tables about a model, and the command line."""
