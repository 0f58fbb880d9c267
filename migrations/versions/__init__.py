"""One module per schema revision; each goes up and down."""
