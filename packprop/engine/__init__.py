"""One backward pass: what is swept when, and how results of leaves come together."""
