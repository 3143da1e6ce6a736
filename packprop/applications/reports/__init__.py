"""Reports for people: tables about a model, pages, and the command line."""
