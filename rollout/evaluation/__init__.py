"""What ``taildraft evaluate`` tries: reused drafts on fixed chains, free texts, sampling laws, speed."""
