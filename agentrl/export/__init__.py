"""Exports the records of a run to files for other programs: Parquet, JSONL, AReaL's dump, padded tensors.

selection       which rows: `--what`, `--state`, `--steps`
columns         the columns of each kind of row
rows            the rows, page by page
formats         pages of rows to Parquet or JSONL
areal           AReaL's dump, as text
trajectory_log  the same text, while a run goes on
tensors         AReaL's tensor dict, padded
output          files and folders that appear complete or not at all
job             one export from beginning to end
"""
