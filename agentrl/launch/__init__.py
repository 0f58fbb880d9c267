"""`agentrl train`: one run on one machine.

folder      the run's folder: lock, configuration, database, what may change when it is resumed
parts       the command line and environment of every process
process     one of them: started behind a guard, watched, restarted, ended
snapshot    the run as the store has it right now
progress    what the terminal shows
train       the supervisor that puts these together
summary     summary.json
curve       curve.png and the curve in the terminal
demo        a packaged run, and its before/after page
"""
