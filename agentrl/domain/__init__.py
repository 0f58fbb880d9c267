"""The pure domain: types that cross module borders, and functions without I/O. It loads neither torch nor SQL."""
