"""What a trace adds to advice: which experts are asked for, and so which to keep."""
