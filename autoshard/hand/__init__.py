"""Plans written by hand: style names become facts of a plan of ours, stock styles are applied literally."""
