"""A corpus of public facts in our own sentences, with questions, and pages rendered from it."""
