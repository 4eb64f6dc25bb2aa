"""What shows that answers can be believed: validation, reproduction, diagnosis."""
