"""How a training process ends, for whoever started it.

0: done, or stopped by a signal and saved. 1: an error, or a loss that was not finite. 2: a mistake of the user's or a
file system's fault, told in one line. Starting again helps after none of these but a stop.
"""

import os

RESTART = os.EX_TEMPFAIL  # 75: it got stuck, or lost another process; started again it resumes
