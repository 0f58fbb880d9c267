"""Tools written for verl: classes with `create`, `execute`, `calc_reward` and `release`."""
