"""Rows that `llama-bench` measured on the machine in question."""
