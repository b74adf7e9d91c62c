"""Messages between the processes of a job."""
