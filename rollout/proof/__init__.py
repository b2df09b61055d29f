"""What ``taildraft verify`` proves, part by part: equal texts, exact laws, and faults that must be caught."""
