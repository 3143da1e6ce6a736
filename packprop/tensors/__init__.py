"""What is known of a tensor without computing with it: its samples, precision, device, state."""
