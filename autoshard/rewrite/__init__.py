"""Arguments in the user's source that become a rank's share, on one module's own copy of the function."""
