"""What is known about a tensor without computing with it: where its samples are, precision, device, state."""
