"""Many runs from one command: sweep notation, run folders, launchers, and how runs at once share a machine."""
