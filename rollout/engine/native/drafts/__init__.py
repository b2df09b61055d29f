"""Drafting in the native engine: drafters and their health, what they see of it, and what drafts leave."""
