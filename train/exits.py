"""The exit code of `python -m train` by which launchers know that it is to be started again."""

import os

# 75: another process of the run was lost, or a step hung, and the same command resumes from the last checkpoint. The
# others call for no restart: 0 done or stopped, 1 the loss was not finite, 2 a mistake.
RESTART = os.EX_TEMPFAIL
