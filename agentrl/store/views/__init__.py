"""What pages show: reads of a bounded number of rows, whatever the size of the run."""
