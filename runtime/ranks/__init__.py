"""Processes and their groups: started, introduced to each other, watched for failures."""
