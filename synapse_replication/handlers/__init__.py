"""What is done with commands and rows; every collaborator is an argument."""
