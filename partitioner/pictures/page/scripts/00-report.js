// The data of the page, and a place for what all sections share.
const report = JSON.parse(document.getElementById('data').textContent);
const twoPlans = report.plans.length > 1;
