"""Drafting in the native engine: drafters and their health, what they see of the engine, what they leave."""
