// Light or dark: as the system says, until the button is pressed. Pictures on a canvas listen for the change.

function startTheme() {
  const button = document.getElementById('theme');
  const system = matchMedia('(prefers-color-scheme: dark)');
  let chosen = null;
  const apply = () => {
    const theme = chosen || (system.matches ? 'dark' : 'light');
    document.documentElement.dataset.theme = theme;
    button.textContent = theme === 'dark' ? 'Light theme' : 'Dark theme';
    window.dispatchEvent(new Event('themechange'));
  };
  button.addEventListener('click', () => {
    chosen = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
    apply();
  });
  system.addEventListener('change', apply);
  window.addEventListener('beforeprint', () => {
    document.documentElement.dataset.theme = 'light'; // paper is white
  });
  window.addEventListener('afterprint', apply);
  apply();
}
