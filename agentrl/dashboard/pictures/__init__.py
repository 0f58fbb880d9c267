"""Pictures as SVG: the layout of shapes, without styles."""
