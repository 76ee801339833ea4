"""What is asked of a GPU, on a machine that may lack most packages."""
