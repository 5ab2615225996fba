"""QSA and DSA on several GPUs of one host, beside one GPU. `run.sh` runs it, `drive.py` says how."""
