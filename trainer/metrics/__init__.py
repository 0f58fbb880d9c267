"""The metrics of steps and evaluations, and the sinks that they are sent to."""
