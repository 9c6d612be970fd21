"""What a group is worth: reward functions, how they are called and add up, and the advantages of siblings."""
