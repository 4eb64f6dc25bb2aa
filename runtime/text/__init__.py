"""Text that models read: the shipped corpus, and prompts from files."""
