"""Reads tasks from files, folders, object storage, the Hugging Face hub and functions, row by row.

file_rows      rows of JSONL, CSV, Parquet and Arrow files
located_files  the files of a source, and what identifies their content
hub_files      the Parquet files of a dataset on the Hugging Face hub
task_shape     a row becomes a task: columns, templates, length, bounds
task_stream    the tasks of a source as JSON text; short lists for evaluation
"""
