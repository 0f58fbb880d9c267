"""Object storage: folders with checksums, and files, in a bucket of S3 or in another file system of fsspec.

object_store       objects by key; every operation is repeated a few times while the storage does not answer
folder_manifest    the files of a folder and their SHA-256
stored_folders     writes and reads folders; a folder without its manifest is incomplete
folder_cache       folders on this host's disk, bounded in size, shared by its processes
storage_probe      tries a storage
datasets           JSONL files, read through the cache
"""
