"""Kills processes of real training runs at random, and checks the invariants afterwards.

agent         runs the episodes; records in a file of its own the answers and acknowledgements that it received
run           `agentrl train` as a child process: start, find its parts, kill them, follow it, end it
killer        plans from a seed which part is killed when, and kills it
ray_nodes     a Ray cluster of simulated nodes
cluster_run   a training run on that cluster, and its faults
measured_run  the frame of a benchmark of one run over several hosts: folder, database, losses, report
losses        compares the database with the agent's file, by plain SQL
"""
