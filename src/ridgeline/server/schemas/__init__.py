"""What requests look like, one file for each family of interfaces. Unknown fields are ignored, as clients expect."""
