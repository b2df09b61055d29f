"""What this machine can do with this policy: measured, judged, kept, and checked again."""
