"""`agentrl train`: one run on one machine.

run_folder      the run's folder: lock, configuration, database, what a resume may change
connect         keys, ports, and the file with which programs reach the proxy
parts           the command line and environment of each process
part_process    one process: start behind a guard, watch, restart, end
starts          the start timeout of engines
local_run       the supervisor
snapshot        the run's current state, from the store
live_panel      the terminal display
summary         summary.json
curve           curve.png, and the curve as text
packaged_runs   the demo and its results
create          `agentrl run create`
"""
