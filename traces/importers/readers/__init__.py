"""What importers share: reading the file formats that other tools write."""
