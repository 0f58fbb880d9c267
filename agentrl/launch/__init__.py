"""`agentrl train`: one run, on this machine or on the hosts of a scheduler.

run_folder      the run's folder: lock, configuration, database, what a resume may change
run_lifecycle   how a run begins and ends, wherever its processes are
connect         keys, ports, and the file with which programs reach the proxy
create          `agentrl run create`
packaged_runs   the demo and its results
views           what a person sees of the run

on this machine:
local_run       the supervisor
parts           the command line and environment of each process
part_process    one process: start behind a guard, watch, restart, end
starts          the start timeout of engines
engine_specs    the engines, as the configuration says

on the hosts of a scheduler:
placed_run      the supervisor
placed_parts    what each host runs
"""
