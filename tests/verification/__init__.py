"""Long verifications as commands; the tests run a slice of each."""
