"""Settings from data: measurements, replays of the policies, and fits with their held-out error.

`calibrate` and the experiments stand on it; it knows no experiment.
"""
