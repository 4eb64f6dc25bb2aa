"""What routing policies do to a model's predictions."""
