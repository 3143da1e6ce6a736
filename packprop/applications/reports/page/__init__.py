"""The page of a profile: one HTML file with figures, which needs no network."""
