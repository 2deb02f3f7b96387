"""What runs have left behind, for people. Reads records; opens no device, and trains nothing."""
