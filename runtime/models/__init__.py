"""Hugging Face MoE models, their gates and experts."""
