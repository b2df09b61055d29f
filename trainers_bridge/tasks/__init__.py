"""What a policy can be trained on: questions, and a reward that can be checked."""
