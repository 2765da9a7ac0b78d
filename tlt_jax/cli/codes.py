"""How the program ends: its exit codes. Besides, 130 and 143 stand for SIGINT and SIGTERM."""

DONE, FAULT, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
